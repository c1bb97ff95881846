"""The check of a damaged lake file where Headrace came with the job, as a zip file, and is not installed."""

import pickle
import subprocess
from pathlib import Path

from headrace.lake.storage.storage import storage_of
from headrace.pipeline.audit.files import FileWork
from headrace.reader.view import LogLocation
from tests.lake.rows import rows, write
from tests.spark.cluster import archive_of_headrace, workers_without_headrace

WORKER = """\
import pickle, sys
package, sys.executable = sys.argv[1:]
work = sys.stdin.buffer.read()
try:
    import headrace
    sys.exit("this Python has headrace already")
except ModuleNotFoundError:
    sys.path.insert(1, package)  # as Spark's workers do
from headrace.pipeline.audit.files import check_files
[found] = check_files([pickle.loads(work)])
print(found.unreadable, [finding.topic for finding in found.findings])
"""


def test_a_damaged_file_is_read_in_another_process_that_has_the_package_too(tmp_path: Path) -> None:
    (written,) = write(tmp_path / "lake", rows("orders", [bytes(300)] * 20))
    path = tmp_path / "lake" / written.path
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)
    work = FileWork(
        storage=storage_of(tmp_path / "lake"),
        path=written.path,
        shown="",
        bytes=len(content),
        bounds={},
        place=LogLocation(),
        kept={},
    )
    python = workers_without_headrace(tmp_path)["PYSPARK_PYTHON"]
    done = subprocess.run(
        [python, "-c", WORKER, archive_of_headrace(tmp_path), python],
        cwd=tmp_path,
        env={},
        input=pickle.dumps(work),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    # Only a process that has read the file knows the topic of the damage.
    assert done.stdout.decode() == "None ['orders']\n"
