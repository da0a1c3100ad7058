-- A worker takes its node's place, unless another one lives there. One that is stopping, or is known to be dead, lives
-- there no more. Answers {'entered'}, or {'taken', who, milliseconds until it counts as gone, its record ('' for none)}.
-- KEYS node alive, nodes ; ARGV node_id, incarnation, alive_ms ('0': only ask), incarnations known to be dead...
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[2] then
  local record = redis.call('HGET', KEYS[2], ARGV[1])
  local left = record and cjson.decode(record).stopping == true
  for i = 4, #ARGV do left = left or ARGV[i] == holder end
  if not left then return {'taken', holder, redis.call('PTTL', KEYS[1]), record or ''} end
end
if ARGV[3] ~= '0' then redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3]) end
return {'entered'}
