CREATE TABLE IF NOT EXISTS tfw_counters (
    scope text COLLATE "C" NOT NULL,
    key text COLLATE "C" NOT NULL,
    win text COLLATE "C" NOT NULL,
    start_ms bigint,
    end_ms bigint,
    used bigint,
    until_ms bigint NOT NULL,
    quota text,
    -- What a charge has read, for the comparison in ON CONFLICT. Set in a row: the row is none.
    had_start bigint,
    had_end bigint,
    had_used bigint,
    had_until bigint,
    PRIMARY KEY (scope, key, win)
) WITH (fillfactor = 60);

CREATE INDEX IF NOT EXISTS tfw_counters_until_ms ON tfw_counters (until_ms);

CREATE OR REPLACE VIEW tfw AS
SELECT
    scope AS name,
    CASE WHEN key ~ '^[tu][^,%]*$' THEN substr(key, 2) ELSE key END AS key,
    quota,
    used,
    to_timestamp(start_ms / 1000.0) AS start,
    to_timestamp(until_ms / 1000.0) AS until
FROM tfw_counters
WHERE until_ms > extract(epoch FROM clock_timestamp()) * 1000 AND start_ms IS NOT NULL AND had_until IS NULL;
