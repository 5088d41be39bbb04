"""A data set packed into files: units of work, processes that run them, a journal, and writers of packed files."""
