"""Names of the tables in artifacts that several stages read, by the stage that writes them."""

BLOCKS, DOCUMENTS = "blocks.parquet", "documents.parquet"
"""Of ``build-corpus`` and ``build-dataset``: the text, and where it comes from."""

IDF = "idf.parquet"
"""Of ``build-idf``."""

TREES = "deps.parquet"
"""Of ``build-deps``."""

VOCABULARY, COUNTS = "vocabulary.parquet", "counts.parquet"
"""Of ``build-cooccur``: the tokens that are counted, and the counts of pairs."""
