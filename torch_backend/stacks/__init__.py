"""What stock transformers and TRL do with packed documents, beside the patch: the tables of ``crosspack audit``."""
