-- Wakes up to `count` idle workers of an environment. No more than 16 tokens lie ready: a worker that
-- leaves requests waiting wakes one more worker.
local function notify(environment, count)
  local wakeup = tag .. ':wakeup:' .. environment
  local missing = math.min(count, 16) - redis.call('LLEN', wakeup)
  for _ = 1, missing do redis.call('RPUSH', wakeup, '1') end
end
