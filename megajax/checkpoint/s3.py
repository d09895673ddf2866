"""Buckets with the interface of Amazon S3: the same server for tensorstore and s3fs, and orbax taught about `s3://`.

Orbax 0.12 knows the buckets of `gs://` only; it completes and deletes checkpoints there as every object store needs it,
and builds their specifications for tensorstore in the functions that `prepare` replaces.
"""

import functools
import os
from typing import Any

from megajax.checkpoint.orbax_internals import gcs_utils, tensorstore_utils

SCHEME = "s3://"
AMAZON = "amazonaws.com"  # in the addresses of its own servers


def key_value_store(url: str) -> dict[str, Any]:
    """Tensorstore's specification of the objects whose names begin with a URL."""
    bucket, _, path = url.removeprefix(SCHEME).partition("/")
    return {"driver": "s3", "bucket": bucket, "path": path} | _server()


@functools.cache
def _server() -> dict[str, Any]:
    """The server, region and credentials with which s3fs opens a bucket: from AWS_* variables and `~/.aws/config`.

    Amazon's servers tell tensorstore the region of a bucket.
    """
    from botocore.session import Session  # pyright: ignore  # comes with s3fs

    session = Session()
    server, found = session.create_client("s3").meta, {}
    if AMAZON not in server.endpoint_url:
        region = "us-east-1" if server.region_name == "aws-global" else server.region_name
        found = {"endpoint": server.endpoint_url, "aws_region": region}
    # Tensorstore's default reads no file unless it is told a profile. s3fs takes these variables first too.
    by_file = {"type": "default", "profile": session.profile or "default"}
    return found | {"aws_credentials": {"type": "environment"} if "AWS_ACCESS_KEY_ID" in os.environ else by_file}


@functools.cache
def prepare() -> None:
    """From now on in this process: orbax treats URLs of `s3://` as those of `gs://`, and s3fs knows AWS_REGION."""
    if "AWS_REGION" in os.environ:  # Amazon's newer tools read it; botocore reads the other name
        os.environ.setdefault("AWS_DEFAULT_REGION", os.environ["AWS_REGION"])
    for_gcs, normalize = gcs_utils.get_kvstore_for_gcs, tensorstore_utils._normalize_path
    known = (*gcs_utils._GCS_PATH_PREFIX, SCHEME)
    gcs_utils._GCS_PATH_PREFIX = known
    gcs_utils.get_kvstore_for_gcs = lambda path: key_value_store(path) if path.startswith(SCHEME) else for_gcs(path)
    tensorstore_utils._use_gcs_driver = lambda directory: directory.startswith(known)
    tensorstore_utils._normalize_path = lambda path: normalize(path).replace("s3:/", SCHEME)
