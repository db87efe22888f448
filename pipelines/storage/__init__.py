"""The store on disk: files that are published whole, manifests, artifacts, names, locks and transfer."""
