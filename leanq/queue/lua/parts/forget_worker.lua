local function forget_worker(worker)
  redis.call('ZREM', tag .. ':workers', worker)
  redis.call('HDEL', tag .. ':info', worker)
  redis.call('UNLINK', tag .. ':stop:' .. worker)
end
