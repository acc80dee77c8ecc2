"""S3 servers on loopback for tests: moto's, and any other one whose address and keys are known."""

import contextlib
import functools
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

MOTO = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print("http://{}:{}".format(*server.get_host_and_port()), flush=True)
sys.stdin.read()
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Server:
    """An S3 server, and the keys of a user with the permission to create buckets."""

    endpoint: str
    access_key: str = "test"
    secret_key: str = "secret of tests"

    def environment(self, endpoint: str | None = None) -> dict[str, str]:
        """Return the variables with which S3 clients reach this server, or a proxy of it at `endpoint`."""
        return {
            "AWS_ENDPOINT_URL": endpoint or self.endpoint,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
            "AWS_EC2_METADATA_DISABLED": "true",
            # Older servers refuse the checksums that newer clients of Amazon add to each request.
            "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
            "AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required",
        }

    def objects(self, bucket: str) -> dict[str, int]:
        """Return the keys of `bucket` and their sizes in bytes."""
        return {key: found["Size"] for key, found in self._listed(bucket).items()}

    def _listed(self, bucket: str) -> dict[str, Any]:
        pages = _client(self).get_paginator("list_objects_v2").paginate(Bucket=bucket)
        return {found["Key"]: found for page in pages for found in page.get("Contents", [])}

    def create_bucket(self, name: str) -> None:
        _client(self).create_bucket(Bucket=name)

    def copy(self, source: str, target: str) -> None:
        """Give the bucket `target` the objects of the bucket `source`, and no others. It is created if necessary."""
        client = _client(self)
        if target not in {bucket["Name"] for bucket in client.list_buckets()["Buckets"]}:
            self.create_bucket(target)
        wanted, found = ({key: one["ETag"] for key, one in self._listed(name).items()} for name in (source, target))
        if extra := [{"Key": key} for key in found.keys() - wanted.keys()]:
            client.delete_objects(Bucket=target, Delete={"Objects": extra})
        for key in wanted:
            if found.get(key) != wanted[key]:
                client.copy_object(Bucket=target, Key=key, CopySource={"Bucket": source, "Key": key})

    def put(self, bucket: str, key: str, body: bytes) -> None:
        _client(self).put_object(Bucket=bucket, Key=key, Body=body)

    def get(self, bucket: str, key: str) -> bytes:
        body: bytes = _client(self).get_object(Bucket=bucket, Key=key)["Body"].read()
        return body

    def delete(self, bucket: str, key: str) -> None:
        _client(self).delete_object(Bucket=bucket, Key=key)


@functools.cache
def _client(server: S3Server) -> Any:
    import boto3
    from botocore.config import Config

    keys = {"aws_access_key_id": server.access_key, "aws_secret_access_key": server.secret_key}
    unused = Config(request_checksum_calculation="when_required", s3={"addressing_style": "path"})
    return boto3.client("s3", endpoint_url=server.endpoint, region_name="us-east-1", config=unused, **keys)


@contextlib.contextmanager
def moto() -> Iterator[S3Server]:
    """Run moto's server in a process, which ends with this one."""
    command, pipe = [sys.executable, "-c", MOTO], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        endpoint = process.stdout.readline().strip()
        assert endpoint, "moto's server did not start"
        try:
            yield S3Server(endpoint=endpoint)
        finally:
            process.kill()
