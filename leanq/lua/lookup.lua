#!lua flags=allow-oom
-- lookup: what became of requests, for a client that waits for them; attaches them to its inbox.
-- ARGV: client, time-to-live of replies (ms), most attempts, the rids
-- Returns per rid: the reply, or 1 queued, 2 leased or attached to another, 0 unknown.
local client, ttl, most = ARGV[1], ARGV[2], tonumber(ARGV[3])
local now, told, out = now_ms(), {}, {}
for i = 4, #ARGV do
  local rid = ARGV[i]
  local key = P .. ':req:' .. rid
  local r = call('HMGET', key, 'st', 'exp', 'l', 'n', 'at', 'c', 'on')
  -- What runs for its followers alone has ended.
  if r[1] and r[6] ~= '' then
    if r[6] ~= client then call('HSET', key, 'c', client) end
    local deadline, leader = tonumber(r[2]), r[7]
    if r[1] ~= 'leased' and deadline > 0 and now > deadline then
      if leader then detach(rid, leader) end
      expire(rid, r[3], client, tonumber(r[4]), tonumber(r[5]), now, ttl, told, leader)
      out[#out + 1] = call('GET', P .. ':reply:' .. rid)
    else
      -- Nobody waits for a run that is none, whatever the server has lost.
      if leader and not is_follower(rid, leader) then
        call('ZREM', P .. ':with:' .. leader, rid)
        r[1] = put_back(rid, false, most, now, ttl, told)
      end
      out[#out + 1] = r[1] == 'queued' and 1 or 2
    end
  else
    out[#out + 1] = call('GET', P .. ':reply:' .. rid) or 0
  end
end
tell(told, ttl)
return out
