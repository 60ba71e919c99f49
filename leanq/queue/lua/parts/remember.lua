-- parts: publish
-- arguments: remember_ms
-- Remembers a verdict by the environment's fingerprint and the request's digest. Either is '' if the reply
-- is not to be remembered.
local function remember(fingerprint, digest, reply)
  if remember_ms > 0 and digest ~= '' and fingerprint ~= '' then
    publish.write(tag .. ':verdict:' .. fingerprint .. ':' .. digest, reply, remember_ms)
  end
end
