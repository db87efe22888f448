"""Statistics of text for guidance: idf, co-occurrence, dependency trees, and the role columns built from them."""
