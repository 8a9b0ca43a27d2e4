"""Galleries in Milvus, for more images than one machine can hold, with the same protocol as a gallery in a folder."""
