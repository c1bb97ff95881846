"""An aggregation in a process of its own, without Spark, to be killed; and a reducer of an application."""

import json
import sys
from typing import Any


def gather(state: Any, message: Any) -> Any:
    return [*(state or ()), message]


def main() -> None:
    # Here: whoever wants the function needs none of these.
    from headrace.pipeline.aggregate import aggregate
    from headrace.pipeline.points import Points
    from headrace.pipeline.tasks import LocalRunner

    points, given = sys.argv[1:]
    aggregate(**json.loads(given), runner=LocalRunner(), points=Points(points))


if __name__ == "__main__":
    main()
