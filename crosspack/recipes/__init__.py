"""Files of options for ``crosspack train``, which ``crosspack recipes`` lists and writes."""
