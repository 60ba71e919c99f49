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
local overrun = call('ZRANGEBYSCORE', work, '-inf', now, 'LIMIT', 0, 100)
for _, rid in ipairs(overrun) do
  call('ZREM', work, rid)
  requeue(rid, true, tonumber(ARGV[3]), now, ttl, told)
end
if #overrun > 0 then call('HINCRBY', P .. ':stats', 'reaped', #overrun) end
tell(told, ttl)
local lapsed = call('ZRANGEBYSCORE', P .. ':workers', '-inf', now, 'LIMIT', 0, 1)
return {call('ZCARD', work), #lapsed, overrun, call('HEXISTS', P .. ':info', worker)}
