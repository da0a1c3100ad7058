-- What is left to tell of an ended task: 'nothing', 'wait' (somebody is at it), 'tell' (all of it) or 'call' (the callback
-- alone). A teller that is through says so with '1'. Until all is told, the task is looked at again, less and less often,
-- and as soon as the claim of a process that delivers its callback has run out.
-- KEYS task, untold, callback claim ; ARGV task_id, told ('1', else '0'), longest_ms
local task, untold, task_id = KEYS[1], KEYS[2], ARGV[1]
local t = redis.call('HMGET', task, 'ended_ms', 'told', 'tells', 'request')
if not t[1] then
  if redis.call('EXISTS', task) == 0 then redis.call('ZREM', untold, task_id) end
  return 'nothing'
end
local told = t[2] == '1' or ARGV[2] == '1'
if ARGV[2] == '1' then redis.call('HSET', task, 'told', '1') end
local claim = redis.call('GET', KEYS[3])
if told and claim ~= 'done' then
  local read, request = pcall(cjson.decode, t[4])
  if not read or not request.callback_url or request.callback_url == cjson.null then claim = 'done' end
end
if told and claim == 'done' then
  redis.call('ZREM', untold, task_id)
  return 'nothing'
end
if ARGV[2] == '1' then return 'wait' end
local now = now_ms()
local longest = tonumber(ARGV[3])
if claim and claim ~= 'done' then longest = math.max(0, redis.call('PTTL', KEYS[3])) + 100
elseif told then longest = 60000 end
if told and claim then
  redis.call('ZADD', untold, now + longest, task_id)
  return 'wait'
end
local tells = redis.call('HINCRBY', task, 'tells', 1)
redis.call('ZADD', untold, now + math.min(longest, 15000 * 2 ^ math.min(tells, 20)), task_id)
return told and 'call' or 'tell'
