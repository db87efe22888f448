"""``guide report``: runs as one page that can be read, printed and cited."""
