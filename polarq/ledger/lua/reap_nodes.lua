-- Notices nodes that went without a word, once each, and forgets those that are gone for long.
-- KEYS nodes, nodes_lost, events ; ARGV events_max, keep_ms, most records of lost nodes. Answers those just noticed.
local nodes, lost, events = KEYS[1], KEYS[2], KEYS[3]
local now = now_ms()
local noticed = {}
local function forget_node(id)
  redis.call('HDEL', nodes, id)
  redis.call('ZREM', lost, id)
  redis.call('HDEL', beside(nodes, 'rules'), id)
  redis.call('DEL', beside(nodes, 'node-flags:' .. id))
  local left = redis.call('HKEYS', beside(nodes, 'sandboxes:' .. id))
  if #left > 0 then
    emit(events, ARGV[1], 'node.sandboxes_abandoned', {node_id = id, runtime_ids = left})
    redis.call('DEL', beside(nodes, 'sandboxes:' .. id))
  end
end
for _, id in ipairs(redis.call('HKEYS', nodes)) do
  if redis.call('EXISTS', beside(nodes, 'node-alive:' .. id)) == 1 then
    redis.call('ZREM', lost, id)
  elseif redis.call('ZADD', lost, 'NX', now, id) == 1 then
    emit(events, ARGV[1], 'node.lost', {node_id = id})
    noticed[#noticed + 1] = id
  end
end
for _, id in ipairs(redis.call('ZRANGEBYSCORE', lost, '-inf', now - ARGV[2])) do forget_node(id) end
for _, id in ipairs(redis.call('ZRANGE', lost, 0, -1 - ARGV[3])) do forget_node(id) end
-- One that came back and left in order has no record any more.
for _, id in ipairs(redis.call('ZRANGE', lost, 0, -1)) do
  if redis.call('HEXISTS', nodes, id) == 0 then redis.call('ZREM', lost, id) end
end
return noticed
