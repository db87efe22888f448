"""The store on the disk: files that are published whole, manifests, artifacts, and what keeps them in order."""
