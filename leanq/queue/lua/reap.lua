#!lua flags=allow-oom
-- reap: takes the work of one worker whose lease lapsed, at most 100 requests a call, or fewer
-- where they have many followers.
-- ARGV: most attempts, time-to-live of replies (ms), lease (ms)
-- Returns {requests put back, requests poisoned, 1 where there may be more to reap,
--   time until leases are judged again (ms)}.
local most, ttl = tonumber(ARGV[1]), ARGV[2]
local now, told = now_ms(), {}
local judged_at = expiry_grace(now, tonumber(ARGV[3]))
if now < judged_at then return {0, 0, 0, judged_at - now} end
local worker = call('ZRANGEBYSCORE', P .. ':workers', '-inf', now, 'LIMIT', 0, 1)[1]
if not worker then return {0, 0, 0, 0} end
local work = P .. ':work:' .. worker
local ends = {queued = 0, poisoned = 0, lost = 0}
for _, request_id in ipairs(call('ZRANGE', work, 0, 99)) do
  call('ZREM', work, request_id)
  local how = requeue(request_id, true, most, now, ttl, told)
  ends[how] = ends[how] + 1
  if disbanded >= FOLLOWERS then break end
end
if call('EXISTS', work) == 0 then forget_worker(worker) end
local reaped = ends.queued + ends.poisoned
if reaped > 0 then call('HINCRBY', STATS, 'reaped', reaped) end
tell(told, ttl)
return {ends.queued, ends.poisoned, 1, 0}
