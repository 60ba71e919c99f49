#!lua flags=allow-oom
-- cancel: the client withdraws requests.
-- ARGV: time-to-live of replies (ms), the rids
-- Returns per rid: 1 cancelled, 0 too late or unknown.
local ttl = ARGV[1]
local now, told, out = now_ms(), {}, {}
for i = 2, #ARGV do
  local rid = ARGV[i]
  local r = call('HMGET', P .. ':req:' .. rid, 'st', 'l', 'c', 'w', 'n', 'at', 'd', 'on')
  -- What runs for its followers alone has ended before.
  local ends = r[1] and r[3] ~= ''
  if ends then
    local runs_on = false
    if r[1] == 'queued' then
      -- The rid stays in its list, where claim passes over it: LREM would walk the whole list.
      call('HINCRBY', P .. ':stats', 'waiting:' .. r[2], -1)
    elseif r[8] then
      detach(rid, r[8])
    else
      runs_on = r[7] and call('ZCARD', P .. ':with:' .. rid) > 0
      if not runs_on then stop(rid, r[4], r[2], r[7]) end
    end
    local reply = verdict_reply('cancelled', tonumber(r[5]), now - tonumber(r[6]))
    if runs_on then
      call('HSET', P .. ':req:' .. rid, 'c', '')
      answer(rid, r[3], reply, ttl, told)
    else
      finish(rid, r[3], reply, ttl, told)
    end
    call('HINCRBY', P .. ':stats', 'verdict:cancelled', 1)
  end
  out[#out + 1] = ends and 1 or 0
end
tell(told, ttl)
return out
