"""Galleries in Milvus, for where one machine is not enough: the same protocol as a gallery in a folder."""
