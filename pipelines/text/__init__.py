"""Text on its way in: from files of many kinds to blocks, sentences, words with trees, and packed token ids."""
