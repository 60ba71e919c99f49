-- each call: lasting = string.sub(tag, 1, -4)
-- The tag of keys that outlast a layout of records: releases of every layout share them (see keys.py).
local lasting
