"""Files, folders, URLs and hub data sets as records: ``crosspack.read``, and the parts that many processes read."""

from crosspack.reading.places import BadRecord, Row
from crosspack.reading.records import Records, read

__all__ = ["BadRecord", "Records", "Row", "read"]
