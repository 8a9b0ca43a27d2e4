"""What brings a student's embedding into its teacher's space."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from cbmir.training.model import LinearHead, ProxyHead

#: Width of the neighbourhood, in cosine, within which a batch's other images compete.
TEMPERATURE = 0.05
# Keeps log(score) and log(1 - score) finite where a score reaches 0 or 1.
_EPSILON = 1e-6


class DistillationLoss(nn.Module):
    """Regression, neighbours and scores, each zero where the student answers as the teacher does; no label is read.

    With unit embeddings s of the student and t of the teacher, of the same image i, and the teacher's own head:

    - regression, 1 - s_i . t_i = |s_i - t_i|^2 / 2. Where the teacher's gallery is what the student searches, plain
      regression is hard to beat (M. Budnik and Y. Avrithis, "Asymmetric metric learning for knowledge transfer",
      CVPR 2021);
    - neighbours, T KL(softmax_j(t_i . t_j / T) || softmax_j(s_i . t_j / T)) over the other images j of the batch: the
      student's query must rank the teacher's gallery as the teacher's query does (H. Wu et al., "Contextual similarity
      distillation for asymmetric image retrieval", CVPR 2022, there with each image's neighbours in a gallery). Times
      T, so that its gradient in a cosine is a difference of probabilities, of the size of the regression's;
    - scores, the mean over labels of KL between the two Bernoulli distributions that the head makes of them (G. Hinton
      et al., "Distilling the knowledge in a neural network", 2015): a linear head reads lengths, which the other two
      terms do not see.
    """

    def forward(self, head: ProxyHead | LinearHead, pooled: Tensor, embedding: Tensor, taught: Tensor) -> Tensor:
        """`taught`, float32 [N, D], are the teacher's pooled features of the images that `pooled` [N, D] are of."""
        teacher = functional.normalize(taught, dim=1)
        regression = 1 - (embedding * teacher).sum(dim=1).mean()
        scores = bernoulli_divergence(head(taught, teacher), head(pooled, embedding))
        return regression + neighbour_divergence(teacher, embedding) + scores


def neighbour_divergence(teacher: Tensor, student: Tensor) -> Tensor:
    """T times the mean KL of whom an image stands next to among the teacher's others: two of [N, D] -> scalar.

    0 for fewer than three images: with a single other one there is nothing to choose.
    """
    if len(teacher) < 3:
        return student.new_zeros(())
    own = torch.eye(len(teacher), dtype=torch.bool, device=teacher.device)
    wanted, found = (
        (side @ teacher.T / TEMPERATURE)[~own].view(len(teacher), -1).log_softmax(dim=1) for side in (teacher, student)
    )
    return TEMPERATURE * functional.kl_div(found, wanted, reduction="batchmean", log_target=True)


def bernoulli_divergence(wanted: Tensor, found: Tensor) -> Tensor:
    """Mean KL between probabilities: two of [N, C] in [0, 1] -> scalar."""
    p, q = (side.clamp(_EPSILON, 1 - _EPSILON) for side in (wanted, found))
    return (p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()).mean()
