-- arguments: randoms
-- each call: random.at = 1
-- Makes random numbers from the caller's bytes, six for each: the server's own begin alike with every call.
local random = {}

-- Returns so many numbers from 0 to below 1, or nil if too few bytes are left.
function random.take(count)
  if random.at + 6 * count - 1 > #randoms then return nil end
  local taken = {}
  for i = 1, count do
    local high, low = struct.unpack('>I2I4', randoms, random.at)
    taken[i] = (high * 4294967296 + low) / 281474976710656
    random.at = random.at + 6
  end
  return taken
end
