"""Models of whole words that are trained from nothing: a multi-scale CNN and a BiLSTM, and what they share with `role_transformer`.

They save, load and register like the classes of transformers.  What an example gets does not depend on the padding of its batch.

Source: the baselines of Wang et al. 2020 (role-guided masks).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
    initialization,
)
from transformers.modeling_outputs import BaseModelOutput, SequenceClassifierOutput

KERNELS = (1, 2, 3, 4)
"""Widths of the filters of the CNN, in words."""

_DENSE = 100
"""Units of the hidden layer of the CNN."""


class CNNConfig(PreTrainedConfig):
    """The configuration of a multi-scale CNN.

    ``hidden_size`` is the width of embeddings, ``num_filters`` the number of filters of each width.
    """

    model_type = "cnn"
    vocab_size: int = 1000
    hidden_size: int = 100
    num_filters: int = 100
    hidden_dropout_prob: float = 0.2
    pad_token_id: int = 0


class BiLSTMConfig(PreTrainedConfig):
    """The configuration of a BiLSTM.

    ``hidden_size`` is the width of embeddings, ``lstm_size`` the number of units of each direction.
    """

    model_type = "bilstm"
    vocab_size: int = 1000
    hidden_size: int = 100
    lstm_size: int = 300
    hidden_dropout_prob: float = 0.2
    pad_token_id: int = 0


class WordModel(PreTrainedModel):
    """What models of words share: word embeddings, and how weights begin.

    Matrices begin as Xavier (Glorot) uniform, biases at 0.  Embeddings begin uniform in ±0.5: as spread as those that the paper draws
    for words without a vector, and about as large as word vectors and positions.
    """

    base_model_prefix = "model"
    has_heads = False
    """Whether there are attention heads to guide."""

    def words_of(self, input_ids: Tensor) -> Tensor:
        """Which ids are words and no padding, as calls without an attention mask read them: bool (B, T)."""
        return input_ids != self.config.pad_token_id

    def get_input_embeddings(self) -> nn.Module:
        owner: Any = self.base_model
        embeddings: nn.Module = owner.embeddings
        return embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        owner: Any = self.base_model
        owner.embeddings = value

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding):
            initialization.uniform_(module.weight, -0.5, 0.5)
            if module.padding_idx is not None:
                initialization.zeros_(module.weight[module.padding_idx])
        elif isinstance(module, (nn.Linear, nn.Conv1d)):
            initialization.xavier_uniform_(module.weight)
            if module.bias is not None:
                initialization.zeros_(module.bias)
        elif isinstance(module, nn.LSTM):
            for name, parameter in module.named_parameters():
                if name.startswith("bias"):
                    initialization.zeros_(parameter)
                else:
                    initialization.xavier_uniform_(parameter)
        elif isinstance(module, nn.LayerNorm):
            initialization.ones_(module.weight)
            initialization.zeros_(module.bias)


class WordTrunk(WordModel):
    """A model of words without its classifier.  Subclasses define `_states`."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        embedded_BTd: Tensor = self.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        if attention_mask is not None:
            valid_BT = attention_mask.bool()
        elif input_ids is not None:
            valid_BT = self.words_of(input_ids)
        else:
            valid_BT = torch.ones(embedded_BTd.shape[:2], dtype=torch.bool, device=embedded_BTd.device)
        return BaseModelOutput(last_hidden_state=self._states(embedded_BTd * valid_BT[..., None], valid_BT, **kwargs))

    def _states(self, embedded_BTd: Tensor, valid_BT: Tensor, **kwargs: Any) -> Tensor:
        """The hidden states from word embeddings, which are zero at padding.  Abstract: subclasses define it."""
        raise NotImplementedError


class CNNModel(WordTrunk):
    """Filters of several widths over word embeddings, each pooled to its highest value: (B, 1, filters of all widths).

    A filter starts at every valid word; beyond the end it reads zeros.
    """

    config_class = CNNConfig

    def __init__(self, config: CNNConfig) -> None:
        super().__init__(config)
        self.filters = nn.ModuleList(nn.Conv1d(config.hidden_size, config.num_filters, width) for width in KERNELS)
        self.post_init()

    def _states(self, embedded_BTd: Tensor, valid_BT: Tensor, **kwargs: Any) -> Tensor:
        words_BdT = embedded_BTd.transpose(1, 2)
        pooled = []
        for width, layer in zip(KERNELS, self.filters, strict=True):
            values_BFT = functional.relu(layer(functional.pad(words_BdT, (0, width - 1))))
            pooled.append(values_BFT.masked_fill(~valid_BT[:, None], 0.0).amax(-1))  # after ReLU nothing is below 0
        states: Tensor = self.dropout(torch.cat(pooled, -1))[:, None]
        return states


class BiLSTMModel(WordTrunk):
    """The last states of two LSTMs, one for each direction: (B, 1, units of both).

    The words of an example come first, then its padding.
    """

    config_class = BiLSTMConfig

    def __init__(self, config: BiLSTMConfig) -> None:
        super().__init__(config)
        self.lstm = nn.LSTM(config.hidden_size, config.lstm_size, batch_first=True, bidirectional=True)
        self.post_init()

    def _states(self, embedded_BTd: Tensor, valid_BT: Tensor, **kwargs: Any) -> Tensor:
        lengths = valid_BT.sum(-1).clamp(min=1).cpu()
        packed = pack_padded_sequence(embedded_BTd, lengths, batch_first=True, enforce_sorted=False)
        _, (last_2BD, _) = self.lstm(packed)
        states: Tensor = self.dropout(torch.cat([*last_2BD], -1))[:, None]
        return states


class WordClassifier(WordModel):
    """A classifier on one vector for each example."""

    def __init__(self, config: Any, trunk: WordModel, width: int) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = trunk
        self.classifier = nn.Linear(width, config.num_labels)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        """Logits (B, classes)."""
        kwargs.pop("token_type_ids", None)
        states = self.model(input_ids, attention_mask, inputs_embeds, **kwargs).last_hidden_state
        if attention_mask is None and input_ids is not None:
            attention_mask = self.words_of(input_ids).long()
        logits = self.classifier(self._vector(states, attention_mask))
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutput(loss=loss, logits=logits)

    def _vector(self, states: Tensor, attention_mask: Tensor | None) -> Tensor:
        return states[:, 0]


class CNNForSequenceClassification(WordClassifier):
    """Classifies pooled filters through a hidden layer."""

    config_class = CNNConfig

    def __init__(self, config: CNNConfig) -> None:
        super().__init__(config, CNNModel(config), _DENSE)
        self.dense = nn.Linear(len(KERNELS) * config.num_filters, _DENSE)
        self.post_init()

    def _vector(self, states: Tensor, attention_mask: Tensor | None) -> Tensor:
        return functional.relu(self.dense(states[:, 0]))


class BiLSTMForSequenceClassification(WordClassifier):
    """Classifies the last states of both directions."""

    config_class = BiLSTMConfig

    def __init__(self, config: BiLSTMConfig) -> None:
        super().__init__(config, BiLSTMModel(config), 2 * config.lstm_size)
        self.post_init()


OWN_CLASSES: dict[str, Any] = {}
"""Model classes of ours, which transformers does not have, by name."""


def register(config: Any, model: Any, classifier: Any) -> None:
    """Make the auto classes of transformers know a model of ours."""
    OWN_CLASSES.update({own.__name__: own for own in (model, classifier)})
    AutoConfig.register(config.model_type, config)
    AutoModel.register(config, model)
    AutoModelForSequenceClassification.register(config, classifier)


register(CNNConfig, CNNModel, CNNForSequenceClassification)
register(BiLSTMConfig, BiLSTMModel, BiLSTMForSequenceClassification)
