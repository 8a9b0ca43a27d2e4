"""Community search: search the gallery's nearest Louvain communities, found in a graph of similar images.

Haq, Moradi and Wang, "A deep community based approach for large scale content based X-ray image retrieval", Medical
Image Analysis 68, 2021: take the features of a network trained with binary cross-entropy, build a graph of similar
images, find its communities, and search those nearest to the query. The communities are those of Blondel, Guillaume,
Lambiotte and Lefebvre, "Fast unfolding of communities in large networks", J. Stat. Mech., 2008.

We chose the details of graph and search: each image has edges to its 10 nearest neighbours, weighted by cosine, and
whole communities are visited in the order of their centroids' cosine with the query until there are enough images.
Exact search differs only if a near image is in a community that was not visited.
"""

from __future__ import annotations

import networkx as nx
import numpy as np
from numpy.typing import NDArray
from sklearn.neighbors import kneighbors_graph

from cbmir.errors import RunError


class CommunityGraph:
    """Communities of a gallery of unit vectors, float [G, D]. Raises RunError for fewer than two images.

    At least `least` images are visited for every query, if the gallery has as many. The default is enough for 100
    answers after the query's own patient is left out.
    """

    def __init__(self, features: NDArray[np.floating], *, seed: int, neighbours: int = 10, least: int = 300) -> None:
        if len(features) < 2:
            raise RunError(f"a community graph needs a gallery of two or more images, found {len(features)}")
        self._features, self._least = features, least
        found = nx.community.louvain_communities(similarity_graph(features, neighbours), weight="weight", seed=seed)
        self.communities: list[NDArray[np.intp]] = [np.array(sorted(community), dtype=np.intp) for community in found]
        means = np.stack([features[community].mean(axis=0) for community in self.communities])
        # A mean of zero has no direction and stays zero, so its cosine with every query is 0.
        self._centroids = means / np.maximum(np.linalg.norm(means, axis=1, keepdims=True), 1e-12)
        self._sizes = np.array([len(community) for community in self.communities])

    def similarity(self, query: NDArray[np.floating]) -> NDArray[np.float64]:
        """Return the cosine with each gallery image, -inf for those not visited: unit vector [D] -> float64 [G]."""
        order = np.argsort(-(self._centroids @ query), kind="stable")
        needed = int(np.searchsorted(np.cumsum(self._sizes[order]), self._least)) + 1
        visited = np.concatenate([self.communities[community] for community in order[:needed]])
        similarity = np.full(len(self._features), -np.inf)
        similarity[visited] = self._features[visited] @ query
        return similarity


def similarity_graph(features: NDArray[np.floating], neighbours: int) -> nx.Graph:
    """Build an undirected graph: images have an edge, weighted by cosine, if one is among the other's nearest.

    `features` are unit vectors [G, D]. A cosine of 0 or less gives no edge, since modularity cannot use it.
    """
    nearest = kneighbors_graph(features, min(neighbours, len(features) - 1), mode="distance").tocoo()
    cosine = 1 - nearest.data.astype(np.float64) ** 2 / 2
    graph = nx.Graph()
    graph.add_nodes_from(range(len(features)))
    graph.add_weighted_edges_from(
        (int(row), int(column), float(weight))
        for row, column, weight in zip(nearest.row, nearest.col, cosine, strict=True)
        if weight > 0
    )
    return graph
