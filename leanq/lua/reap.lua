#!lua flags=allow-oom
-- reap: takes the work of one worker whose lease lapsed, at most 100 requests a call.
-- ARGV: most attempts, time-to-live of replies (ms)
-- Returns {requests put back, requests poisoned, 1 where there may be more to reap}.
local most, ttl = tonumber(ARGV[1]), ARGV[2]
local now, told = now_ms(), {}
local worker = call('ZRANGEBYSCORE', P .. ':workers', '-inf', now, 'LIMIT', 0, 1)[1]
if not worker then return {0, 0, 0} end
local work = P .. ':work:' .. worker
local back, poisoned = 0, 0
for _, rid in ipairs(call('ZRANGE', work, 0, 99)) do
  call('ZREM', work, rid)
  if requeue(rid, true, most, now, ttl, told) == 'queued' then
    back = back + 1
  else
    poisoned = poisoned + 1
  end
end
if call('EXISTS', work) == 0 then forget_worker(worker) end
if back + poisoned > 0 then call('HINCRBY', P .. ':stats', 'reaped', back + poisoned) end
tell(told, ttl)
return {back, poisoned, 1}
