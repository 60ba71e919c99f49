#!lua flags=allow-oom
-- release: gives unfinished work back to the front.
-- ARGV: worker, most attempts, time-to-live of replies (ms),
--   how: keep, charge (the attempt counts) or defer (to the end of the line), 
--   1 to leave the fleet, (request id, token)*
-- Returns how many were given back; a token that is no longer current changes nothing.
local worker, most, ttl = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local now, told, given = now_ms(), {}, 0
-- From the last to the first, so that the front of the line keeps their order.
for i = #ARGV - 1, 6, -2 do
  local run = read_lease(call('HGET', WHERE, ARGV[i]))
  if run and run.token == ARGV[i + 1] then
    call('ZREM', P .. ':work:' .. worker, ARGV[i])
    requeue(ARGV[i], ARGV[4] == 'charge', most, now, ttl, told, ARGV[4] == 'defer')
    given = given + 1
  end
end
if given > 0 then call('HINCRBY', STATS, 'released', given) end
tell(told, ttl)
-- A worker that still has work stays known, so that the reaper finds that work.
if ARGV[5] == '1' and call('EXISTS', P .. ':work:' .. worker) == 0 then forget_worker(worker) end
return given
