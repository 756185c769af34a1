// What the other files share; all are one program. The numbers of Phase, Finish, Snapshot and Run are macros (PHASE_DECODE, ...),
// and LANES is the work-items of a group. A parameter has the name of the contract's field that it is bound to, x_rows and
// x_width are the first and second size of x. The second dimension of a launch counts what the launch length counts.

typedef global const int *Ints;
typedef global int *IntsOut;
typedef global const float *Floats;
typedef global float *FloatsOut;

#define NO_TOKEN -1
#define PAD_SLOT -1
#define NO_ROW -1

// What each work-item of a group brings, joined in an order that is always the same, and given to all of them.
#define OVER_GROUP(NAME, TYPE, JOINED)                                  \
    TYPE NAME(TYPE own, local TYPE *shared) {                           \
        const int lane = get_local_id(0);                               \
        shared[lane] = own;                                             \
        barrier(CLK_LOCAL_MEM_FENCE);                                   \
        for (int count = LANES / 2; count > 0; count /= 2) {            \
            if (lane < count) {                                         \
                const TYPE a = shared[lane], b = shared[lane + count];  \
                shared[lane] = JOINED;                                  \
            }                                                           \
            barrier(CLK_LOCAL_MEM_FENCE);                               \
        }                                                               \
        own = shared[0];                                                \
        barrier(CLK_LOCAL_MEM_FENCE);                                   \
        return own;                                                     \
    }

OVER_GROUP(group_sum, float, a + b)
OVER_GROUP(group_max, float, fmax(a, b))
OVER_GROUP(group_total, ulong, a + b)
OVER_GROUP(group_best, ulong, max(a, b))
