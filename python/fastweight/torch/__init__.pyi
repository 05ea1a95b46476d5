# SPDX-License-Identifier: Apache-2.0
# Written by tools/make_python_stub.py from the table; tests/package/test_ops_table.py holds it to that.
from ..ops import linear_attn as linear_attn
from ..ops import simple_gla as simple_gla
from ..ops import retention as retention
from ..ops import lightning as lightning
from ..ops import gla as gla
from ..ops import delta_rule as delta_rule
from ..ops import gated_delta_rule as gated_delta_rule
from ..ops import comba as comba
from ..ops import kda as kda
from ..ops import gdn2 as gdn2
from ..ops import gated_delta_product as gated_delta_product
from ..ops import iplr as iplr
from ..ops import dplr as dplr
from ..ops import rwkv7 as rwkv7
from ..ops import by_axes as by_axes
from ..ops import short_conv as short_conv
from ..ops import l2_norm as l2_norm
from ..ops import rms_norm as rms_norm
from ..ops import gate_activation as gate_activation
from ..ops import feature_map as feature_map
from ..ops import attention as attention
from ..ops import linear as linear
