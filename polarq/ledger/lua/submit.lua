-- KEYS task, tombstone, tasks, waiting, events
-- ARGV task_id, request, digest, num, run_id, celery_id, harness, model, stem, events_max, keep_s,
--   most that may wait of all runs and of this one ('' for no limit), memory budget and
--   the share of it that refuses, then names and values of what routing needs
local task, tombstone, tasks, waiting, events = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local task_id, request, digest, num, run_id = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5]
local stem, max = ARGV[9], ARGV[10]
if redis.call('EXISTS', tombstone) == 1 then return {'cancelled'} end
local known = redis.call('HMGET', task, 'digest', 'state', 'celery_id')
if known[1] then
  if known[1] == digest then
    -- Another Celery id that waits for the same task is told of its end too.
    if not string.find(',' .. known[3] .. ',', ',' .. ARGV[6] .. ',', 1, true) and #known[3] < 4096 then
      redis.call('HSET', task, 'celery_id', known[3] .. ',' .. ARGV[6])
    end
    return {'exists', known[2], known[3]}
  end
  return {'conflict', known[2]}
end
local waiting_now, own_now = redis.call('ZCARD', waiting), redis.call('ZCARD', beside(waiting, 'run-waiting:' .. run_id))
if ARGV[12] ~= '' and waiting_now + num > tonumber(ARGV[12]) then return {'full', 'all', waiting_now} end
if ARGV[13] ~= '' and own_now + num > tonumber(ARGV[13]) then return {'full', 'run', own_now} end
local used, budget = memory_use(ARGV[14], waiting)
if budget > 0 and used >= budget * ARGV[15] then return {'memory', used, budget} end
local now = now_ms()
redis.call('HSET', task, 'request', request, 'digest', digest, 'num', num, 'run_id', run_id, 'celery_id', ARGV[6],
  'harness', ARGV[7], 'model', ARGV[8], 'state', 'running', 'queued', num, 'created_ms', now, 'updated_ms', now)
if #ARGV > 15 then redis.call('HSET', task, unpack(ARGV, 16)) end
for i = 0, num - 1 do
  redis.call('HSET', stem .. i, 'state', 'queued', 'attempt', 0, 'token', 0, 'queued_ms', now)
  wait_in_line(waiting, task, task_id .. '.' .. i, now)
end
remember(waiting, run_id, task_id, now)
redis.call('ZADD', tasks, now, task_id)
redis.call('ZREMRANGEBYSCORE', tasks, '-inf', now - tonumber(ARGV[11]) * 1000)
emit(events, max, 'task.created', {task_id = task_id, status = 'running', harness = ARGV[7], model = ARGV[8],
  num_samples = num, run_id = run_id})
return {'created', 'running', ARGV[6]}
