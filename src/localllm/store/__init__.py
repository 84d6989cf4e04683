"""The local model store: names, blobs, manifests, the catalogue and where models come from."""
