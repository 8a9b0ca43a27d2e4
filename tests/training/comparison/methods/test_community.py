"""Community search: planted communities, the graph against all pairs, and answers against exact search."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest

from cbmir.errors import RunError
from cbmir.training.comparison.methods.community import CommunityGraph, similarity_graph

SIZES = (20, 30, 25)


def unit(x: np.ndarray) -> np.ndarray:
    return (x / np.linalg.norm(x, axis=-1, keepdims=True)).astype(np.float32)


def planted(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Three tight clusters around axes; the third axis is nearer to the first than the second is."""
    axes = unit(np.array([[1, 0, 0, 0], [0, 1, 0, 0], [0.7, 0, 0.7, 0]]))
    member = np.repeat(np.arange(3), SIZES)
    noise = 0.05 * np.random.default_rng(seed).standard_normal((len(member), 4))
    return unit(axes[member] + noise), member


def test_the_graph_joins_nearest_neighbours_by_their_cosine() -> None:
    features = unit(np.random.default_rng(1).standard_normal((30, 3)))
    cosine = features.astype(np.float64) @ features.T.astype(np.float64)
    expected = {}
    for i in range(30):
        others = sorted((j for j in range(30) if j != i), key=lambda j: -cosine[i, j])
        expected |= {tuple(sorted((i, j))): cosine[i, j] for j in others[:4] if cosine[i, j] > 0}
    found = {tuple(sorted((i, j))): weight for i, j, weight in similarity_graph(features, 4).edges(data="weight")}
    assert found.keys() == expected.keys()
    assert all(found[edge] == pytest.approx(expected[edge], abs=1e-5) for edge in expected)


def test_opposite_images_share_no_edge_but_stay_in_the_graph() -> None:
    graph = similarity_graph(np.array([[1, 0], [-1, 0], [1, 0]], np.float32), 10)
    assert sorted(graph.nodes) == [0, 1, 2]
    assert [sorted(edge) for edge in graph.edges] == [[0, 2]]


def test_identical_images_are_not_their_own_neighbours() -> None:
    graph = similarity_graph(np.tile(np.array([[0.6, 0.8]], np.float32), (5, 1)), 2)
    assert nx.number_of_selfloops(graph) == 0
    assert all(weight == pytest.approx(1) for _, _, weight in graph.edges(data="weight"))


def test_planted_communities_are_found_and_that_of_the_query_is_visited_first() -> None:
    features, member = planted()
    graph = CommunityGraph(features, seed=0, least=5)
    assert all(len(set(member[community].tolist())) == 1 for community in graph.communities)
    query = unit(np.array([0.1, 1, 0, 0]))
    similarity = graph.similarity(query)
    visited = np.isfinite(similarity)
    assert set(member[visited]) == {1}
    assert visited.sum() >= 5
    assert np.allclose(similarity[visited], features[visited] @ query)


def test_whole_communities_are_visited_nearest_first_until_there_are_enough_images() -> None:
    # With 15 neighbours each cluster is one community, so their sizes are known.
    features, member = planted()
    query = unit(np.array([1, 0.1, 0.05, 0]))
    for least, expected in ((1, [0]), (20, [0]), (21, [0, 2]), (45, [0, 2]), (46, [0, 1, 2]), (1000, [0, 1, 2])):
        graph = CommunityGraph(features, seed=0, neighbours=15, least=least)
        assert sorted(len(community) for community in graph.communities) == sorted(SIZES)
        similarity = graph.similarity(query)
        assert sorted(set(member[np.isfinite(similarity)].tolist())) == expected
        assert np.isfinite(similarity).sum() == sum(SIZES[bundle] for bundle in expected)


def test_every_image_is_in_one_community_and_a_wide_search_is_the_exact_one() -> None:
    features = unit(np.abs(np.random.default_rng(2).standard_normal((200, 16))))
    graph = CommunityGraph(features, seed=0, least=200)
    assert sorted(np.concatenate(graph.communities).tolist()) == list(range(200))
    for query in unit(np.abs(np.random.default_rng(3).standard_normal((5, 16)))):
        assert np.allclose(graph.similarity(query), features @ query)


def test_a_narrow_search_ranks_visited_images_first_and_in_exact_order() -> None:
    features = unit(np.abs(np.random.default_rng(4).standard_normal((200, 16))))
    query = unit(np.abs(np.random.default_rng(5).standard_normal(16)))
    similarity = CommunityGraph(features, seed=0, least=30).similarity(query)
    visited = np.flatnonzero(np.isfinite(similarity))
    assert 30 <= len(visited) < 200
    ranked = np.argsort(-similarity, kind="stable")[: len(visited)]
    assert sorted(ranked) == visited.tolist()
    exact = sorted(visited, key=lambda i: -float(features[i] @ query))
    assert ranked.tolist() == exact


def test_communities_are_those_of_louvain_with_weights_and_the_seed() -> None:
    features = unit(np.random.default_rng(6).standard_normal((150, 8)))
    graph = similarity_graph(features, 10)

    def louvain(weight: str | None, seed: int) -> list[list[int]]:
        return sorted(sorted(c) for c in nx.community.louvain_communities(graph, weight=weight, seed=seed))

    found = sorted(community.tolist() for community in CommunityGraph(features, seed=3).communities)
    assert found == louvain("weight", 3)
    assert found != louvain(None, 3)
    assert found != louvain("weight", 4)


def test_one_image_is_too_few() -> None:
    with pytest.raises(RunError, match="two or more images, found 1"):
        CommunityGraph(np.ones((1, 3), np.float32), seed=0)
