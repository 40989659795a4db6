// A preloaded library in which fsync and fdatasync take 60 s once STALL_FILE exists.
#include <cstdlib>
#include <dlfcn.h>
#include <unistd.h>

static bool planted() {
    const char *file = getenv("STALL_FILE");
    return file && access(file, F_OK) == 0;
}

template <typename F> static F real(const char *name) { return reinterpret_cast<F>(dlsym(RTLD_NEXT, name)); }

extern "C" int fsync(int descriptor) {
    if (planted()) sleep(60);
    return real<int (*)(int)>("fsync")(descriptor);
}

extern "C" int fdatasync(int descriptor) {
    if (planted()) sleep(60);
    return real<int (*)(int)>("fdatasync")(descriptor);
}
