// A preloaded library in which fsync and fdatasync take 60 s, and fork finds no process id, once STALL_FILE exists.
#include <cerrno>
#include <cstdlib>
#include <dlfcn.h>
#include <sys/types.h>
#include <unistd.h>

static bool planted(const char *what) {
    const char *wanted = getenv("STALL_PRELOAD"), *file = getenv("STALL_FILE");
    return wanted && file && wanted[0] == what[0] && access(file, F_OK) == 0;
}

template <typename F> static F real(const char *name) { return reinterpret_cast<F>(dlsym(RTLD_NEXT, name)); }

extern "C" int fsync(int descriptor) {
    if (planted("sync")) sleep(60);
    return real<int (*)(int)>("fsync")(descriptor);
}

extern "C" int fdatasync(int descriptor) {
    if (planted("sync")) sleep(60);
    return real<int (*)(int)>("fdatasync")(descriptor);
}

extern "C" pid_t fork() {
    if (planted("pids")) { errno = EAGAIN; return -1; }
    return real<pid_t (*)()>("fork")();
}
