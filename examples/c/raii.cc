// The interface in C++: a session, a pin and a mapping that give themselves back.
#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <vector>

#include <gdrapi.h>
#include <gdrapi_ext.h>

namespace {

void must(int result)
{
    if (result != 0)
        throw std::runtime_error(gdrx_last_error());
}

class Session {
public:
    Session() : g_(gdr_open())
    {
        if (!g_)
            throw std::runtime_error(gdrx_last_error());
    }
    ~Session() { gdr_close(g_); }
    Session(const Session &) = delete;
    Session &operator=(const Session &) = delete;

    gdr_t get() const { return g_; }

private:
    gdr_t g_;
};

// Any device address and size. The memory must stay allocated while this lives.
class Mapping {
public:
    Mapping(const Session &session, std::uint64_t addr, std::size_t bytes) : g_(session.get()), size_(bytes)
    {
        must(gdr_pin_buffer(g_, addr, bytes, 0, 0, &mh_));
        if (gdrx_map(g_, mh_, &at_, nullptr) != 0) {
            const std::string why = gdrx_last_error();
            gdr_unpin_buffer(g_, mh_);
            throw std::runtime_error(why);
        }
    }
    ~Mapping() { gdr_unpin_buffer(g_, mh_); } // unmaps as well
    Mapping(const Mapping &) = delete;
    Mapping &operator=(const Mapping &) = delete;

    void write(std::size_t offset, const void *from, std::size_t bytes)
    {
        must(gdr_copy_to_mapping(mh_, static_cast<char *>(at_) + offset, from, bytes));
    }
    void read(std::size_t offset, void *to, std::size_t bytes) const
    {
        must(gdr_copy_from_mapping(mh_, to, static_cast<const char *>(at_) + offset, bytes));
    }
    std::size_t size() const { return size_; }

private:
    gdr_t g_;
    gdr_mh_t mh_{};
    void *at_ = nullptr;
    std::size_t size_;
};

} // namespace

int main()
try {
    Session session;
    std::uint64_t addr = 0;
    must(gdrx_alloc(session.get(), -1, 4096, &addr));
    Mapping mapping(session, addr + 100, 1000); // not on a page
    std::vector<unsigned> numbers(250), back(250);
    for (unsigned i = 0; i < 250; i++)
        numbers[i] = i * i;
    mapping.write(0, numbers.data(), mapping.size());
    mapping.read(0, back.data(), mapping.size());
    bool refused = false;
    try {
        mapping.write(990, numbers.data(), 11);
    } catch (const std::runtime_error &error) {
        std::printf("as it should be: %s\n", error.what());
        refused = true;
    }
    return numbers == back && refused ? 0 : 1;
} catch (const std::runtime_error &error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
