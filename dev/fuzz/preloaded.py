"""Imports what the formats read with, once for all processes."""

import pyarrow.parquet  # noqa: F401
import sentencepiece  # noqa: F401
import tokenizers  # noqa: F401

import megajax.checkpoint.inspect  # noqa: F401
import megajax.data.chat  # noqa: F401
import megajax.data.text  # noqa: F401
import megajax.hf.importing  # noqa: F401
import megajax.tools.plan.compile  # noqa: F401
import megajax.tools.plot  # noqa: F401
import megajax.tools.profile.trace  # noqa: F401
import megajax.training.resuming  # noqa: F401
