#!lua flags=allow-oom
-- renew: a sign of life, which extends the worker's lease over all its work.
-- ARGV: worker, lease (ms), most attempts, time-to-live of replies (ms)
-- Returns {size of the processing list, 1 where some worker's lease has lapsed,
--   rids taken away because they ran longer than they may, 1 where the fleet knows this worker}.
local worker, ttl = ARGV[1], ARGV[4]
local now = now_ms()
local work = P .. ':work:' .. worker
call('ZADD', P .. ':workers', now + ARGV[2], worker)
local told = {}
local judged = now >= truce(now, tonumber(ARGV[2]))
local overrun = judged and call('ZRANGEBYSCORE', work, '-inf', now, 'LIMIT', 0, 100) or {}
for i, rid in ipairs(overrun) do
  -- The rest is taken with the next renewal.
  if disbanded >= FOLLOWERS then overrun = {unpack(overrun, 1, i - 1)} break end
  call('ZREM', work, rid)
  requeue(rid, true, tonumber(ARGV[3]), now, ttl, told)
end
if #overrun > 0 then call('HINCRBY', STATS, 'reaped', #overrun) end
tell(told, ttl)
local lapsed = judged and call('ZRANGEBYSCORE', P .. ':workers', '-inf', now, 'LIMIT', 0, 1) or {}
return {call('ZCARD', work), #lapsed, overrun, call('HEXISTS', P .. ':info', worker)}
