#!lua flags=allow-oom
-- cancel: the client withdraws requests.
-- ARGV: time-to-live of replies (ms), the rids
-- Returns per rid: 1 cancelled, 0 too late or unknown.
local ttl = ARGV[1]
local now, told, out = now_ms(), {}, {}
for i = 2, #ARGV do
  local rid = ARGV[i]
  local r = call('HMGET', P .. ':req:' .. rid, 'st', 'l', 'c', 'w', 'n', 'at')
  if r[1] then
    if r[1] == 'queued' then
      -- The rid stays in its list, where claim passes over it: LREM would walk the whole list.
      call('HINCRBY', P .. ':stats', 'waiting:' .. r[2], -1)
    else
      call('ZREM', P .. ':work:' .. r[4], rid)
      call('RPUSH', P .. ':stop:' .. r[4], rid)
    end
    finish(rid, r[3], verdict_reply('cancelled', tonumber(r[5]), now - tonumber(r[6])), ttl, told)
    call('HINCRBY', P .. ':stats', 'verdict:cancelled', 1)
  end
  out[#out + 1] = r[1] and 1 or 0
end
tell(told, ttl)
return out
