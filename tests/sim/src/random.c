// The process's randomness, of which there is none: a seed replays, and the library for a cluster
// asks its nodes in the order of a hash map.
#include <stddef.h>
#include <string.h>

long getrandom(void *bytes, size_t length, unsigned int flags) {
    (void)flags;
    memset(bytes, 42, length);
    return (long)length;
}
