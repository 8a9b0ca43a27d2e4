"""Galleries in Milvus, for when one machine is not enough, with the same protocol as a gallery in a folder."""
