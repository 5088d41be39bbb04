"""Files, folders, URLs and hub data sets as records: ``crosspack.read``, and the parts that many processes read."""

from crosspack.reading.records import Records, read
from crosspack.reading.rows import BadRecord, Row

__all__ = ["BadRecord", "Records", "Row", "read"]
