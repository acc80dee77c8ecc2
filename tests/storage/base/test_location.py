"""Locations in a bucket that clients would read differently are refused, and errors contain no secrets."""

import pytest

from rankscope_storage.base.errors import NotAStoreError
from rankscope_storage.base.location import ObjectPath, located


@pytest.mark.parametrize(
    "text", ["s3://bucket/../x", "s3://bucket/./x", "s3://bucket/a/../x", "s3://bucket/a//x", "s3://"]
)
def test_misread_location_is_refused(text):
    with pytest.raises(NotAStoreError, match="is not a valid location"):
        located(text)


def test_bucket_without_a_prefix_is_a_location():
    assert ObjectPath("bucket", "") == located("s3://bucket") == located("s3://bucket/")


@pytest.mark.parametrize("text", ["s3://AKIA1:hidden@bucket/x", "https://user:hidden@host/x"])
def test_error_about_a_location_contains_no_secret(text):
    with pytest.raises(NotAStoreError) as refused:
        located(text)

    assert "hidden" not in str(refused.value)
