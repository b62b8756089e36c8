CREATE TABLE IF NOT EXISTS tfw_counters (
    scope text COLLATE "C" NOT NULL,
    key text COLLATE "C" NOT NULL,
    win text COLLATE "C" NOT NULL,
    start_ms bigint NOT NULL,
    end_ms bigint NOT NULL,
    used bigint NOT NULL,
    until_ms bigint NOT NULL,
    quota text NOT NULL,
    -- The row's place in the call that wrote it last. Below zero: the row is not a counter yet.
    place integer NOT NULL,
    -- The key first: most comparisons end there.
    PRIMARY KEY (key, scope, win),
    -- Of numbers beyond what is counted, each charge of its call would fail.
    CHECK (until_ms >= 0 AND greatest(abs(start_ms), end_ms, abs(used), until_ms) < 1::bigint << 53)
) WITH (fillfactor = 60);

-- To find that an index is there, CREATE INDEX IF NOT EXISTS would lock the table against writes.
DO $$ BEGIN
    IF to_regclass('tfw_counters_until_ms') IS NULL THEN
        CREATE INDEX tfw_counters_until_ms ON tfw_counters (until_ms);
    END IF;
END $$;

CREATE OR REPLACE VIEW tfw AS
SELECT scope AS name, CASE WHEN key ~ '^[tu][^,%]*$' THEN substr(key, 2) ELSE key END AS key, quota,
    used, to_timestamp(start_ms / 1000.0) AS start, to_timestamp(until_ms / 1000.0) AS until
FROM tfw_counters
WHERE until_ms > extract(epoch FROM clock_timestamp()) * 1000 AND place > 0;

-- Functions, since a session keeps their plans, also behind a pooler that shares sessions. A plan
-- that was made while the table was empty would scan it when it has grown, whatever the query's
-- shape: to scan nothing costs nothing. So they are planned without scans, for all arguments.

-- The server's time and the rows, in the order of the names. The time is taken after the rows.
CREATE OR REPLACE FUNCTION tfw_read(
    scopes text[], keys text[], wins text[],
    OUT now_ms bigint,
    OUT starts bigint[], OUT ends bigint[], OUT useds bigint[], OUT untils bigint[]
) LANGUAGE plpgsql
SET search_path FROM CURRENT SET enable_seqscan = off SET plan_cache_mode = force_generic_plan
-- A server process that waits for a lock would not notice that its client has left.
SET lock_timeout = '100ms'
AS $$
BEGIN
    -- Its clock and its rows are not those that count.
    IF current_setting('transaction_read_only')::boolean THEN
        RAISE read_only_sql_transaction;
    END IF;
    -- A cast would round, and the end of a window would be in the next one.
    SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint, array_agg(t.start_ms),
        array_agg(t.end_ms), array_agg(t.used), array_agg(t.until_ms)
    INTO now_ms, starts, ends, useds, untils
    FROM unnest(scopes, keys, wins) AS r(scope, key, win)
    -- A look-up for each name, as a subquery with OFFSET is not made a join; in their order.
    LEFT JOIN LATERAL (
        SELECT t.start_ms, t.end_ms, t.used, t.until_ms FROM tfw_counters t
        WHERE t.scope = r.scope AND t.key = r.key AND t.win = r.win AND t.place > 0 OFFSET 0
    ) t ON true;
END $$;

-- Writes rows that are as they were known, or of which others have only taken more tokens since, at
-- most as many as the fifth number of the old row says. Returns the server's time, the places of the
-- rows that were written, and then how many more tokens of each others had taken. A row that was
-- none has an end below zero. Rows of a group are written together or not at all, others each by
-- itself. The array of groups ends with the last one. Arrays are read by place, as each argument of
-- unnest() would be a table of its own.
--
-- The rows of groups are locked first. One that another node writes at this moment is skipped, and
-- its group is not written: a group waits for no row that is there. The others are locked in the
-- order of all nodes, and for as long as the statement takes; ON CONFLICT finds them by the primary
-- key.
CREATE OR REPLACE FUNCTION tfw_write(
    scopes text[], keys text[], wins text[], quotas text[], groups integer[],
    olds bigint[], news bigint[], OUT written bigint[]
) LANGUAGE plpgsql
SET search_path FROM CURRENT SET enable_seqscan = off SET plan_cache_mode = force_generic_plan
-- Longer than a statement of another node takes.
SET lock_timeout = '20ms'
AS $$
#variable_conflict use_column
DECLARE lost integer[] := '{}';
BEGIN
    FOR i IN 1 .. cardinality(groups) LOOP
        CONTINUE WHEN groups[i] IS NULL OR groups[i] = ANY (lost);
        IF olds[5 * i - 1] < 0 THEN
            -- A row has to be there, to be locked. Another transaction may be inserting it.
            BEGIN
                INSERT INTO tfw_counters
                VALUES (scopes[i], keys[i], wins[i], 0, 0, 0, news[4 * i], '', -1)
                ON CONFLICT DO NOTHING;
            EXCEPTION WHEN lock_not_available THEN NULL;
            END;
        END IF;
        -- The lock shows the last version of a row, not that of the statement's snapshot.
        PERFORM FROM tfw_counters t
        WHERE t.scope = scopes[i] AND t.key = keys[i] AND t.win = wins[i]
            AND CASE WHEN olds[5 * i - 1] < 0 THEN t.place < 0
                ELSE t.place > 0 AND (t.start_ms, t.end_ms, t.used, t.until_ms)
                    = (olds[5 * i - 4], olds[5 * i - 3], olds[5 * i - 2], olds[5 * i - 1]) END
        FOR UPDATE SKIP LOCKED;
        IF NOT FOUND THEN
            lost := lost || groups[i];
        END IF;
    END LOOP;
    WITH w AS (
        INSERT INTO tfw_counters AS t
        -- What was read and is gone is inserted as no counter.
        SELECT scopes[r.i], keys[r.i], wins[r.i], news[4 * r.i - 3], news[4 * r.i - 2],
            news[4 * r.i - 1], news[4 * r.i], quotas[r.i],
            CASE WHEN olds[5 * r.i - 1] < 0 THEN r.i ELSE -r.i END
        FROM generate_series(1, cardinality(keys)) AS r(i)
        WHERE (groups[r.i] = ANY (lost)) IS NOT TRUE
        ON CONFLICT (key, scope, win) DO UPDATE SET start_ms = excluded.start_ms,
            end_ms = excluded.end_ms, until_ms = excluded.until_ms, quota = excluded.quota,
            used = excluded.used + CASE WHEN excluded.place > 0 THEN 0
                ELSE t.used - olds[-5 * excluded.place - 2] END, place = abs(excluded.place)
        WHERE CASE WHEN excluded.place > 0 THEN t.place < 0
            ELSE t.place > 0 AND (t.start_ms, t.end_ms, t.until_ms)
                = (olds[-5 * excluded.place - 4], olds[-5 * excluded.place - 3],
                    olds[-5 * excluded.place - 1])
                AND t.used - olds[-5 * excluded.place - 2] BETWEEN 0 AND olds[-5 * excluded.place]
            END
        RETURNING t.place, t.used - news[4 * t.place - 1] AS more
    )
    SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint
        || array_agg(w.place::bigint) || array_agg(w.more) INTO written FROM w WHERE w.place > 0;
END $$;

-- What waits for a lock is not done later, when nobody expects it, and holds up no charge for long.
CREATE OR REPLACE FUNCTION tfw_reset(of_scope text, of_key text) RETURNS void LANGUAGE sql
SET search_path FROM CURRENT SET enable_seqscan = off SET lock_timeout = '20ms'
AS $$ DELETE FROM tfw_counters WHERE key = of_key AND scope = of_scope $$;
