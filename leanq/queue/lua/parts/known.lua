-- Returns whether workers have ever offered an environment, or a scaler sizes it. A fleet that begins with
-- nothing has no worker until a request waits.
local function is_known(environment)
  return redis.call('HEXISTS', tag .. ':environments', environment) == 1
    or redis.call('HEXISTS', tag .. ':scaler', environment) == 1
    or redis.call('HLEN', tag .. ':environments') == 0
end
