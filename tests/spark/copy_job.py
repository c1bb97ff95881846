"""A small job as users write it: read topics, copy them in a batch and in a stream, all over `url`.

The stream's progress is kept on the server.

`python -m tests.spark.copy_job cluster|connect ADDRESS URL CHECKPOINT` runs it as the driver of a standalone
cluster, or as a client of Spark Connect. It prints the result as JSON.
"""

import json
import os
import sys
from typing import Any

from headrace.spark import register, session, track
from tests.spark.cluster import CLUSTER


def main(kind: str, address: str, url: str, checkpoint: str) -> None:
    spark = on_cluster(address) if kind == "cluster" else over_connect(address)
    reader = spark.read.format("headrace").option("url", url)
    frame = reader.option("subscribePattern", "in/.*").option("minPartitions", 4).load()
    found = {"rows": frame.count(), "class": type(spark).__module__}
    if kind == "cluster":
        # Each executor has its own process that starts its Python workers.
        found["executors"] = len(set(frame.rdd.mapPartitions(lambda _: [os.getppid()]).collect()))
    copy(frame, "batch").write.format("headrace").mode("append").option("url", url).save()
    track(spark, url)
    stream = spark.readStream.format("headrace").option("url", url).option("minPartitions", 4)
    stream = stream.option("subscribePattern", "in/.*").option("startingOffsets", "earliest")
    stream = stream.option("groupId", "copy")
    writer = copy(stream.load(), "stream").writeStream.format("headrace").option("url", url)
    writer = writer.option("checkpointLocation", checkpoint).trigger(availableNow=True)
    query = writer.start()
    found["ended"] = query.awaitTermination(60)
    print(json.dumps(found))
    if kind == "connect":
        # On a cluster, the last progress has been reported by the end of the script.
        spark.stop()


def copy(frame: Any, prefix: str) -> Any:
    return frame.selectExpr(f"concat('{prefix}/', topic) as topic", "payload")


def on_cluster(master: str) -> Any:
    return session("cluster", master=master, settings=CLUSTER)


def over_connect(address: str) -> Any:
    from pyspark.sql import SparkSession

    spark = SparkSession.builder.remote(address).getOrCreate()
    register(spark)
    return spark


if __name__ == "__main__":
    main(*sys.argv[1:])
