#!lua flags=allow-oom
-- cancel: the client withdraws requests.
-- ARGV: time-to-live of replies (ms), the request ids
-- Returns per request id: 1 cancelled, 0 too late or unknown.
local ttl = ARGV[1]
local now, told, out = now_ms(), {}, {}
for i = 2, #ARGV do
  local request_id = ARGV[i]
  local r = record(request_id)
  if r then
    local place = call('HGET', WHERE, request_id)
    local run, leader = read_lease(place), read_attachment(place)
    local attempts = r[ATTEMPTS] + ((run or leader) and 1 or 0)
    local reply = verdict_reply('cancelled', attempts, now - r[AT])
    if run and run.digest ~= '' and call('ZCARD', P .. ':with:' .. request_id) > 0 then
      -- It runs on for its followers alone.
      lease_to(request_id, run, '')
      answer(request_id, r[CLIENT], reply, ttl, told)
    else
      if run then stop(request_id, run)
      elseif leader then detach(request_id, leader)
      -- The request id stays in its list, where claim passes over it: LREM would walk the whole list.
      else call('HINCRBY', STATS, 'waiting:' .. r[ENVIRONMENT], -1) end
      finish(request_id, r[CLIENT], reply, ttl, told)
    end
    call('HINCRBY', STATS, 'verdict:cancelled', 1)
    tally_end(r[ENVIRONMENT], 'cancelled', 1)
  end
  out[#out + 1] = r and 1 or 0
end
tell(told, ttl)
return out
