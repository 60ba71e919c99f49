#!lua flags=allow-oom
-- lookup: what became of requests, for a client that waits for them; attaches them to its inbox.
-- ARGV: client, time-to-live of replies (ms), the rids
-- Returns per rid: the reply, or 1 queued, 2 leased, 0 unknown.
local client, ttl = ARGV[1], ARGV[2]
local now, told, out = now_ms(), {}, {}
for i = 3, #ARGV do
  local rid = ARGV[i]
  local key = P .. ':req:' .. rid
  local r = call('HMGET', key, 'st', 'exp', 'l', 'n', 'at', 'c')
  if r[1] then
    if r[6] ~= client then call('HSET', key, 'c', client) end
    local deadline = tonumber(r[2])
    if r[1] == 'queued' and deadline > 0 and now > deadline then
      expire(rid, r[3], client, tonumber(r[4]), tonumber(r[5]), now, ttl, told)
      out[#out + 1] = call('GET', P .. ':reply:' .. rid)
    else
      out[#out + 1] = r[1] == 'queued' and 1 or 2
    end
  else
    out[#out + 1] = call('GET', P .. ':reply:' .. rid) or 0
  end
end
tell(told, ttl)
return out
