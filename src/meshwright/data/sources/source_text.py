"""Records of sources: texts, pieces of long ones, and conversations. Torch-free."""

from __future__ import annotations

from meshwright.data.chats.chat_format import Conversation
from meshwright.data.sources.text_pieces import Continued

RecordText = str | Conversation
"""The document of a record."""
SourceText = str | Continued | Conversation
"""A document, or a piece of one whose rest follows."""
