#!lua flags=allow-oom
-- cancel: the client withdraws requests.
-- ARGV: time-to-live of replies (ms), the rids
-- Returns per rid: 1 cancelled, 0 too late or unknown.
local ttl = ARGV[1]
local now, told, out = now_ms(), {}, {}
for i = 2, #ARGV do
  local rid = ARGV[i]
  local r = record(rid)
  if r then
    local place = call('HGET', WHERE, rid)
    local run, leader = read_lease(place), read_attachment(place)
    local attempts = r[ATTEMPTS] + ((run or leader) and 1 or 0)
    local reply = verdict_reply('cancelled', attempts, now - r[AT])
    if run and run.digest ~= '' and call('ZCARD', P .. ':with:' .. rid) > 0 then
      -- It runs on for its followers alone.
      lease_to(rid, run, '')
      answer(rid, r[CLIENT], reply, ttl, told)
    else
      if run then stop(rid, run)
      elseif leader then detach(rid, leader)
      -- The rid stays in its list, where claim passes over it: LREM would walk the whole list.
      else call('HINCRBY', STATS, 'waiting:' .. r[LANE], -1) end
      finish(rid, r[CLIENT], reply, ttl, told)
    end
    call('HINCRBY', STATS, 'verdict:cancelled', 1)
    tally_end(r[LANE], 'cancelled', 1)
  end
  out[#out + 1] = r and 1 or 0
end
tell(told, ttl)
return out
