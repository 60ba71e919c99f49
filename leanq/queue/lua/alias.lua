#!lua flags=allow-oom
-- parts: wait_list known
-- alias: lets a name stand for the environment `target`, from the next submit on: an alias ('e'), or `default`
-- for the tenant `name` ('t'). An empty target takes that away. `check`: refuse what would go wrong; `set`: do it.
-- Returns 1, or why it refuses:
--   `alias`: the target is an alias. `target`: the name is what another alias stands for. `unknown`: see known.
--   `offered`: a worker or a scaler has an environment of this name. `waiting`: requests wait in one.
local key, field = tag .. ':aliases', kind .. ':' .. name

local function is_alias(other) return redis.call('HEXISTS', key, 'e:' .. other) == 1 end

local function is_target()
  local all = redis.call('HGETALL', key)
  for i = 1, #all, 2 do
    if string.sub(all[i], 1, 2) == 'e:' and all[i + 1] == name then return true end
  end
end

-- A worker whose lease has lapsed counts until it is reaped, since its requests come back to their lists.
local function is_offered()
  for _, worker in ipairs(redis.call('ZRANGE', tag .. ':workers', 0, -1)) do
    local readable, info = pcall(cmsgpack.unpack, redis.call('HGET', tag .. ':info', worker) or '')
    local names = readable and type(info) == 'table' and info.environments
    for _, offered in ipairs(type(names) == 'table' and names or {}) do
      if offered == name then return true end
    end
  end
  return redis.call('HEXISTS', tag .. ':scaler', name) == 1
end

if check and target ~= '' then
  if not is_known(target) and not (kind == 't' and is_alias(target)) then
    return is_alias(target) and 'alias' or 'unknown'
  end
  if kind == 'e' then
    if is_target() then return 'target' end
    if is_offered() then return 'offered' end
    if wait_list.any(name) then return 'waiting' end
  end
end
if set and target == '' then
  redis.call('HDEL', key, field)
elseif set then
  redis.call('HSET', key, field, target)
end
return 1
